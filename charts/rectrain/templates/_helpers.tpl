{{- define "rectrain.name" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "rectrain.serviceAccount" -}}
{{- default (include "rectrain.name" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "rectrain.selector" -}}
app.kubernetes.io/name: rectrain-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rectrain.labels" -}}
{{ include "rectrain.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rectrain.image" -}}
{{- with .image.digest }}{{ printf "%s@%s" $.image.repository . }}{{ else }}
{{- printf "%s:%s" .image.repository (default .appVersion .image.tag) -}}{{ end }}
{{- end -}}
