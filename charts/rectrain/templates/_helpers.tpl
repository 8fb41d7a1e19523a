{{- define "rectrain.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
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
{{- end -}}

{{- define "rectrain.image" -}}
{{- printf "%s:%s" .image.repository (default .appVersion .image.tag) -}}
{{- end -}}
